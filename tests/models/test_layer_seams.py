"""The backend computes products only in the engine's decode steps."""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest

from penstock.attention import devices
from penstock.models.layer_seams import attach, decoding
from penstock.plugins.cpu.cpu_backend import CPUBackend


class Counting(CPUBackend):
    """Counts the requested products."""

    asked = 0

    def multiply_weights(self, x: mx.array, weights: mx.array) -> mx.array:
        """Count the call and multiply."""
        Counting.asked += 1
        return super().multiply_weights(x, weights)


class Model(nn.Module):
    """A model with every kind of layer that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False)]
        self.coded = nn.QuantizedLinear(64, 8, group_size=32)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return logits (n, 50)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.as_linear(x + self.coded(mx.ones((1, 64))))


@pytest.fixture(autouse=True)
def fresh() -> None:
    Counting.asked = 0


def test_backend_products_are_used_only_in_decode_steps() -> None:
    model, tokens = Model(), mx.array([1, 2, 3])
    expected, name = model(tokens), repr(model)
    parameters = dict(nn.utils.tree_flatten(model.parameters()))
    attach(model)
    attach(model)
    again = dict(nn.utils.tree_flatten(model.parameters()))
    assert parameters.keys() == again.keys()
    assert repr(model) == name, "the fingerprint of a model is made of it"
    assert all(again[name] is array for name, array in parameters.items())
    with devices.using(Counting()):
        assert mx.array_equal(model(tokens), expected)
        assert Counting.asked == 0
        with decoding(devices.current()):
            assert mx.allclose(model(tokens), expected, atol=1e-5)
            assert Counting.asked == 3  # two layers and the embedding; codes have their own way
            other = threading.Thread(target=lambda: mx.eval(model(tokens)))
            other.start()
            other.join()
            assert Counting.asked == 3
        model(tokens)
    assert Counting.asked == 3


def test_decode_products_are_disabled_after_error() -> None:
    model = Model()
    attach(model)
    with devices.using(Counting()):
        with pytest.raises(ValueError), decoding(devices.current()):
            model(mx.zeros((1, 2, 3)))
        model(mx.array([1]))
    assert Counting.asked == 0


def test_other_layer_classes_are_unchanged() -> None:
    class Own(nn.Linear):
        """Multiplies in its own way."""

    own = Own(4, 4)
    model = Model()
    model.layers.append(own)
    attach(model)
    assert type(own) is Own
    assert isinstance(model.layers[0], nn.Linear) and type(model.layers[0]) is not nn.Linear
