"""From survivors and versions to a restored rank: a pure plan, and the executor that carries it out."""
