"""Have ranks start again without importing everything again."""
