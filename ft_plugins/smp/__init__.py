"""The snapshot management process (SMP), one per node: owns the segments, outlives training."""
