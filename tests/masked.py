"""The plainest layout, which tests compare the others with."""

from torch import Tensor

from harnessrl.attention import sdpa


class Masked:
    """A dense mask: token t attends to token u where mask[t, u]."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        return sdpa(q, k, v, scaling, mask=self.mask)
