"""Framework adapters: each implements `model.host.Host` for one framework."""
