"""What tests and benchmarks start real jobs with, and compare them by. Imported as `harness`."""
