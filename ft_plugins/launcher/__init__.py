"""ft-run: torchrun's arguments, an elastic agent bounded by progress, and a watcher that keeps the SMP alive."""
