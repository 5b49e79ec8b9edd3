"""What engines share: what an engine is (`engine`), what it makes of a job (`submission`), its
settings from the words of a command line (`options`), scripts (`shell`) and Google's names of TPU
slices (`tpus`).
"""
