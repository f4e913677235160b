"""The layers that GPT and BERT share."""
