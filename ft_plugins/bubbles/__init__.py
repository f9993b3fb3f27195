"""Pipeline bubbles: measure them, plan sends in them, and pace the senders."""
