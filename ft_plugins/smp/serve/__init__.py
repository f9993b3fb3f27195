"""The process: owns its node's segments, and answers the requests of its ranks, launcher and command line."""
