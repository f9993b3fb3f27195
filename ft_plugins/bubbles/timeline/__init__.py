"""When a rank was busy: recorded, exchanged between ranks."""
