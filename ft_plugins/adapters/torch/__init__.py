"""Loops of plain torch, with DistributedDataParallel or FSDP2."""
