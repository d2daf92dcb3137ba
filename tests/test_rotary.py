"""Rotations against rotation matrices written out."""

import pytest
import torch

from wvprobe._rotary import Rotary, rotate_half

FREQUENCIES = torch.tensor([1.0, 0.31, 0.07], dtype=torch.float64)


def matrix(rotary, position, d_head):
    """R of one position, acting on row vectors from the right."""
    out = torch.eye(d_head, dtype=torch.float64)
    planes = len(rotary.inv_freq)
    for plane, frequency in enumerate(rotary.inv_freq):
        i, j = (2 * plane, 2 * plane + 1) if rotary.adjacent else (plane, planes + plane)
        i, j = rotary.start + i, rotary.start + j
        angle = position * frequency
        out[i, i] = out[j, j] = angle.cos()
        out[i, j], out[j, i] = angle.sin(), -angle.sin()
    out[rotary.start : rotary.start + 2 * planes] *= rotary.scaling
    return out


@pytest.mark.parametrize("adjacent", [False, True])
# Full; partial with five dimensions that pass, behind the others or on both sides of them.
@pytest.mark.parametrize(("d_head", "start"), [(6, 0), (11, 0), (11, 5), (11, 2)])
def test_rotation_and_relative_rotation(adjacent, d_head, start):
    rotary = Rotary(FREQUENCIES, 1.2, adjacent, start=start)
    x = torch.randn(5, d_head, dtype=torch.float64)
    for position in (0, 1, 17):
        expected = x @ matrix(rotary, position, d_head)
        found = rotary.rotate(x, torch.tensor(position))
        torch.testing.assert_close(found, expected)
    q, k = x[0], x[1]
    for i, j in ((9, 4), (4, 9), (7, 7)):
        score = rotary.rotate(q, torch.tensor(i)) @ rotary.rotate(k, torch.tensor(j))
        torch.testing.assert_close(rotary.relative(q, i - j) @ k, score)


def test_positions_broadcast():
    rotary = Rotary(FREQUENCIES)
    x = torch.randn(2, 7, 3, 6, dtype=torch.float64)  # batch, pos, head, d_head
    turned = rotary.rotate(x, torch.arange(7)[:, None])
    torch.testing.assert_close(turned[1, 4, 2], rotary.rotate(x[1, 4, 2], torch.tensor(4)))


@pytest.mark.parametrize("start", [0, 5])
def test_tables_of_a_model_give_the_same(start):
    rotary = Rotary(FREQUENCIES, start=start)
    x = torch.randn(1, 7, 3, 11, dtype=torch.float64)
    angles = torch.arange(7)[:, None] * FREQUENCIES
    cos, sin = (torch.cat((f(angles),) * 2, dim=-1)[None] for f in (torch.cos, torch.sin))
    found = rotate_half(x, cos, sin, start)
    torch.testing.assert_close(found, rotary.rotate(x, torch.arange(7)[:, None]))


def test_far_positions_keep_their_precision():
    """In float32 an angle of 10,000 radians is off by half a thousandth."""
    x = torch.tensor([1.0, 0.0])
    found = Rotary(torch.tensor([1.0], dtype=torch.float64)).rotate(x, torch.tensor(10_007))
    expected = torch.tensor(10_007.0, dtype=torch.float64)
    assert float(found[0]) == pytest.approx(float(expected.cos()), abs=1e-7)
