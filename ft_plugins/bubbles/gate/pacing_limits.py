"""The constants by which a gate is followed, and what they make of a link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PacingLimits:
    """The constants of pacing, in bytes and seconds. A duty is the part of the time in which frames are under way."""

    # frames in bubbles
    least_frame_bytes: int = 64 << 10  # a smaller frame is not worth its round trip: it waits for the next window
    least_frame_seconds: float = 0.001  # a frame that takes the link this long is worth it, whatever its bytes
    frame_seconds: float = 0.004  # longest frame: a message that ends a bubble early waits this long for it
    slow_frame_bytes: int = 16 << 10  # up to this size a frame may take longer: shorter ones cost mostly processor
    slow_frame_seconds: float = 0.016  # longest frame of up to slow_frame_bytes
    margin: float = 0.75  # part of the time to the deadline for which a frame is sized, so that it ends in time
    much_slower: float = 2.0  # a link this many times slower than planned has bubbles full of training's messages
    slow_link_part: float = 0.25  # duty in windows of such a link, as a part of `rate_duty`
    # outside bubbles: a trickle begins after starved_openings and starved_seconds without a frame
    starved_openings: int = 8
    starved_seconds: float = 5.0
    trickle_duty: float = 0.01
    # a copy that its bubbles did not carry in time, in multiples of the iterations planned for it
    overdue_after: float = 1.5  # the rest goes at a rate, bubbles or not
    through_by: float = 2.5  # by then, if `rate_duty` allows
    retry_frames: int = 16  # until a larger one is tried again
    least_rate_frame_bytes: int = 1 << 10  # shorter frames measure nothing but latency
    # time without an opening after which nothing more is expected of the gate
    patience_seconds: float = 60.0  # under a plan, at least
    patience_iterations: int = 3  # under a plan, at least as many of its iterations: each opens the gate
    unplanned_seconds: float = 1.0  # without a plan
    idle_seconds: float = 1.0  # a sender that has not asked for so long had nothing to send
    # waiting
    poll_seconds: float = 0.002  # between looks at a gate that is open
    opening_seconds: float = 0.02  # until a closed gate is looked at again, though no opening was signalled
    # what carries frames
    payload_bytes: int = 1 << 20  # no frame has more
    # reporting
    reported_bubbles: int = 32  # bubbles whose bytes are reported, the fullest ones


LIMITS = PacingLimits()


def least_bytes(bytes_per_second: float) -> int:
    """Bytes that a window must carry, over a link of that speed, to be planned with."""
    return min(LIMITS.least_frame_bytes, int(LIMITS.least_frame_seconds * bytes_per_second))
