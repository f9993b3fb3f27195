"""The systems, each a recipe over the other packages: REFT and BAFT protect the state, PAFT and local SGD keep replicas
together."""
