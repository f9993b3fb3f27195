"""The systems REFT, BAFT and PAFT, each a short recipe over the other packages."""
