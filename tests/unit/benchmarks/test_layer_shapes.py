"""The models of the DreamDDP paper as layers, and the ratios that follow from its table."""

from __future__ import annotations

import pytest

from workloads.layer_shapes import COLUMNS, LEAST_WIDTH, SHAPES, H, PaperColumn, emulated, shape


@pytest.mark.parametrize(
    ("name", "layers", "millions"), [("resnet18", 18, 11.17), ("resnet50", 18, 23.7), ("gpt2", 26, 124.4),
                                     ("llama2", 38, 175.0)],
)  # fmt: skip
def test_models_have_the_layers_and_parameters_of_the_real_ones(name: str, layers: int, millions: float) -> None:
    assert len(shape(name)) == layers
    assert sum(layer.parameters for layer in shape(name)) / 1e6 == pytest.approx(millions, rel=0.01)
    assert len({layer.name for layer in shape(name)}) == layers


def test_late_convolutions_have_most_parameters_but_all_take_about_as_long() -> None:
    layers = shape("resnet18")[1:-1]
    assert sum(layer.parameters for layer in layers[-4:]) > 0.7 * sum(layer.parameters for layer in layers)
    assert max(layer.work for layer in layers) < 2.1 * min(layer.work for layer in layers)


def test_the_shared_embedding_is_averaged_only_when_the_backward_has_ended() -> None:
    first, *_, head = shape("gpt2")
    assert first.parameters > 0.3 * sum(layer.parameters for layer in shape("gpt2")) and first.work == 0
    assert head.parameters < 0.001 * first.parameters and head.work > 0, "its gradient is part of the embedding's"


@pytest.mark.parametrize("name", SHAPES)
def test_emulated_models_keep_relative_sizes_and_times(name: str) -> None:
    model, layers = emulated(name, 0.9, 1 << 20), shape(name)
    assert sum(model.forwards) == pytest.approx(0.3) and model.compute == pytest.approx(0.9)
    assert model.parameters == pytest.approx(1 << 20, rel=0.01)
    largest = max(range(len(layers)), key=lambda at: layers[at].parameters)
    share = layers[largest].parameters / sum(layer.parameters for layer in layers)
    assert model.widths[largest] == pytest.approx(share * (1 << 20), abs=1) and min(model.widths) >= LEAST_WIDTH


@pytest.mark.parametrize("column", COLUMNS, ids=lambda one: one.name)
def test_ratios_explain_the_paper_s_times(column: PaperColumn) -> None:
    """S-SGD exactly; full synchronisation within what a column's own times differ by; DreamDDP takes the compute at
    least, and the overlapped baseline is no faster than that."""
    compute, communication = column.compute, column.ratio * column.compute
    assert compute + communication == pytest.approx(column.plain)
    assert compute + communication / H == pytest.approx(column.full, rel=0.06)
    assert compute <= column.dreamddp < column.overlapped
    assert column.dreamddp >= 0.97 * communication / H


def test_the_ratios_are_those_of_slow_links() -> None:
    assert [round(column.ratio, 1) for column in COLUMNS] == [1.3, 5.5, 1.3, 7.3, 3.4, 5.4, 3.3, 6.3]
