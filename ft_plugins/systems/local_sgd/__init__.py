"""Local SGD on one rank: policies carried out on its modules and layers."""
