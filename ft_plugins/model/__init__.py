"""Facts about the job: where ranks stand, what their state is made of, what a framework must offer. Pure."""
