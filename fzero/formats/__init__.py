"""The files of others: what other programs write is read by ranges, and what they read is written.

In: folders of `torch.distributed.checkpoint`, of DeepSpeed and in Hugging Face's format, and state dicts of FSDP2. Out:
sources by key, and trees of `Sharded` leaves. `foreign` gives both the names of a tree. `fzero.checkpoint` has the
public names.
"""
