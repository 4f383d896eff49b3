"""Linear layers through oneDNN give what torch gives."""

import pytest
import torch
from torch import nn

from trivium.models.cpu.linear import matmul_transposed, use_onednn


@pytest.mark.parametrize("shape", [(17, 5, 9), (17, 9, 5), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,)], ids=["rows", "batch"])
def test_values_and_gradients(shape, bias, leading):
    rows, wide, out = shape
    torch.manual_seed(0)
    layer = nn.Linear(wide, out, bias=bias)
    x, g = torch.randn(*leading, rows, wide, requires_grad=True), torch.randn(*leading, rows, out)

    def results():
        y = layer(x)
        return y, *torch.autograd.grad(y, [x, *layer.parameters()], g)

    expected = results()
    use_onednn(layer, torch.device("cpu"))
    found = results()
    assert type(found[0].grad_fn) is not type(expected[0].grad_fn)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_other_precisions_are_left_alone():
    layer = nn.Linear(3, 4, dtype=torch.float64)
    before = layer.forward
    use_onednn(layer, torch.device("cpu"))
    assert layer.forward == before
    a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(matmul_transposed(a, b), a @ b.T)


def test_product():
    a, b = torch.randn(5, 3), torch.randn(3, 4)
    torch.testing.assert_close(matmul_transposed(a, b.T), a @ b)
