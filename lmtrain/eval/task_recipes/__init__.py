"""Conversion of the files of published tasks into texts and questions."""
