"""When copies go out: only while the pipeline waits anyway. No socket is touched here, and no clock but the gate's."""
