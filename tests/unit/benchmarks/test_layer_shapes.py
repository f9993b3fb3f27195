"""The models of the DreamDDP paper as layers, and the ratios that follow from its table."""

import pytest

from workloads.layer_shapes import COLUMNS, LEAST_WIDTH, SHAPES, H, emulated, shape


@pytest.mark.parametrize(
    ("name", "layers", "millions"), [("resnet18", 18, 11.17), ("resnet50", 18, 23.7), ("gpt2", 26, 124.4),
                                     ("llama2", 38, 175.0)],
)  # fmt: skip
def test_models_have_the_layers_and_parameters_of_the_real_ones(name, layers, millions):
    assert len(shape(name)) == layers
    assert sum(layer.parameters for layer in shape(name)) / 1e6 == pytest.approx(millions, rel=0.01)
    assert len({layer.name for layer in shape(name)}) == layers


@pytest.mark.parametrize("name", SHAPES)
def test_emulated_models_keep_relative_sizes_and_times(name):
    model, layers = emulated(name, 0.9, 1 << 20), shape(name)
    assert sum(model.forwards) == pytest.approx(0.3) and model.compute == pytest.approx(0.9)
    assert model.parameters == pytest.approx(1 << 20, rel=0.01)
    largest = max(range(len(layers)), key=lambda at: layers[at].parameters)
    share = layers[largest].parameters / sum(layer.parameters for layer in layers)
    assert model.widths[largest] == pytest.approx(share * (1 << 20), abs=1) and min(model.widths) >= LEAST_WIDTH


@pytest.mark.parametrize("column", COLUMNS, ids=lambda one: one.name)
def test_ratios_explain_the_paper_s_times(column):
    """S-SGD exactly; full synchronisation within what a column's own times differ by; DreamDDP takes the compute at
    least, and the overlapped baseline is no faster than that."""
    compute, communication = column.compute, column.ratio * column.compute
    assert compute + communication == pytest.approx(column.plain)
    assert compute + communication / H == pytest.approx(column.full, rel=0.06)
    assert compute <= column.dreamddp < column.overlapped
    assert column.dreamddp >= 0.97 * communication / H
