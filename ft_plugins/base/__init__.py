"""What every floor may use: files, checked input, fault points, times of a start."""
