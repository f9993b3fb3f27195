"""Let traffic through while training does not need the link."""
