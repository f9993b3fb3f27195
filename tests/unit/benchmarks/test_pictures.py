"""Pictures of bubbles: every job, schedule and protection is in them."""

import pytest

from ft_plugins.errors import ConfigError

pytest.importorskip("matplotlib")

from workloads import pictures  # noqa: E402
from workloads.jobs import FAMILY, PAPER  # noqa: E402
from workloads.pipelines.goodput import ProtectionKind  # noqa: E402
from workloads.pipelines.pipeline import PipelineSchedule  # noqa: E402
from workloads.quality_pictures import draw_quality  # noqa: E402
from workloads.quality_runs import POLICIES, QualityOutcome, QualityScale, by_policy, runs  # noqa: E402
from workloads.study import study_scale, study_shape  # noqa: E402


def test_every_picture_names_what_it_shows(tmp_path):
    shapes = [study_shape(job) for batch in PAPER.values() for job in batch]
    scales = [study_scale(job) for job in FAMILY]
    names = [job.name for job in PAPER[64]]
    protections = [protection.title for protection in ProtectionKind]
    drawn = (
        (pictures.draw_shapes, shapes, [*names, "batch 128, microbatch 8", "batch 64, microbatch 8"]),
        (pictures.draw_overheads, shapes, [*names, "BAFT, in bubbles", "at once", "no checkpoints"]),
        (pictures.draw_schedules, scales, [schedule.value for schedule in PipelineSchedule] + ["16384 ranks"]),
        (pictures.draw_goodput, scales, [*protections, "restarts alone", "16384"]),
    )
    for draw, what, labels in drawn:
        path = tmp_path / f"{draw.__name__}.svg"
        draw(what, path)
        text = path.read_text()
        assert not [label for label in labels if f"<!-- {label}" not in text], draw.__name__
    with pytest.raises(ConfigError, match=r"picture.gif: expected a name that ends in one of .png, .svg, .pdf"):
        pictures.draw_shapes(shapes, tmp_path / "picture.gif")


def test_losses_are_drawn_by_policy_with_and_without_garbage(tmp_path):
    scale = QualityScale(40, 4, 10)
    made = [
        QualityOutcome(run, tuple((4 * at, 3.0 / at) for at in range(1, 11)), 2)
        for seed in (1, 2)
        for run in runs("text", seed, scale)
    ]
    path = tmp_path / "quality.svg"
    draw_quality("text", by_policy(made, "text"), path)
    text = path.read_text()
    labels = [*POLICIES, "text: replicas with sound data", "one of four fed garbage (grey)"]
    assert not [label for label in labels if f"<!-- {label}" not in text]
