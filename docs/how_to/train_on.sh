#!/usr/bin/env bash
# Train a model of Hugging Face on in four processes, kill it on the way, and give it back to transformers.
#
#   docs/how_to/train_on.sh qwen3 runs/qwen3
#   docs/how_to/train_on.sh gemma3_text runs/gemma3
#
# The model is a tiny random one of that type, so that nothing is downloaded; it takes a minute or two on two cores. lmtrain
# and transformers (4.57 or 5) must be installed. For a model of your own, begin at `lmtrain import` with its folder.
set -euo pipefail
type=$1 out=$2
python=${PYTHON:-python}
lmtrain() { "$python" -m lmtrain "$@"; }
mkdir -p "$out"

# The corpus of `lmtrain demo`, a tokenizer, and datasets written with it.
"$python" - "$out" <<'PYTHON'
import sys
from pathlib import Path
from data_tools.corpora.stdlib import build_stdlib_corpus

build_stdlib_corpus(Path(sys.argv[1]) / "corpus", heldout_ratio=0.2, max_bytes=1 << 20)
PYTHON
lmtrain tokenizer train "$out/corpus/train.jsonl" --output "$out/random" --vocab-size 500
for part in train heldout; do
  lmtrain preprocess "$out/corpus/$part.jsonl" --tokenizer "$out/random" --output "$out/data/$part" --overwrite
done

# A random model in transformers' own folder, with more rows in its vocabulary than the tokenizer has tokens.
"$python" - "$type" "$out/random" <<'PYTHON'
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {
    "vocab_size": 510, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128, "pad_token_id": None,
}
of_type = {"gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}}
torch.manual_seed(0)
config = AutoConfig.for_model(sys.argv[1], **sizes, **of_type.get(sys.argv[1], {}))
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2])
PYTHON

lmtrain import "$out/random" --output "$out/imported"
layout=(--nproc 4 parallel.tp=2 parallel.pp=2)
run=(pretrain --from-run "$out/imported" "data.path=$out/data/train" "run.dir=$out/run" "${layout[@]}" model.seq_len=64
  compute.threads=1 train.steps=12 train.global_batch=8 train.micro_batch=2 train.valid_interval_steps=0 schedule.warmup_steps=2
  checkpoint.interval_steps=4 observe.log_interval_steps=1 observe.tensorboard=false)
# A rank is killed in step 7; the launcher ends the others and returns 76.
LMTRAIN_ALLOW_FAULTS=1 LMTRAIN_FAULT=kill:point=backward:step=6:rank=2 lmtrain "${run[@]}" && exit 1 || [ $? = 76 ]
lmtrain "${run[@]}"  # the same command resumes from the newest checkpoint

score=(--task perplexity --data "$out/data/heldout" --stride 64 --limit 2)
lmtrain eval "$out/run" "${score[@]}" "${layout[@]}" --output "$out/score.json"
lmtrain reshard "$out/run" --to pp=3 --output "$out/resharded" --overwrite
lmtrain eval "$out/resharded" "${score[@]}" --output "$out/score_resharded.json"
lmtrain export "$out/resharded" --to hf --output "$out/trained"  # compares its logits with transformers'

"$python" - "$out/trained" <<'PYTHON'
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = model.generate(**tokenizer("def main():", return_tensors="pt"), max_new_tokens=20, do_sample=False)
print(type(model).__name__, "continues:", repr(tokenizer.decode(ids[0])))
PYTHON
