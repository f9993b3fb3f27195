"""Facts about the job: places of ranks, state items, timelines, and the protocol of a framework adapter. Pure."""
