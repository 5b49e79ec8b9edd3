"""Models that come in folders of Hugging Face.

text.py         text and tokens: tokenizer.json, and how conversations are written
token_bytes.py  bytes of tokens that are no text by themselves
generation.py   how answers are made unless somebody asks otherwise: generation_config.json
folder.py       a folder, as it is served
adapter.py      adapters of PEFT, for a folder that is served
writing.py      what is served, as a folder
"""
