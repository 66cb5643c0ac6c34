"""What the library tells about itself: `explain`, `verify`, `data_shard`."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from tests.model_t import ModelT
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import batches_of_t, split


def explained(rank: Rank) -> str:
    import autosp_dtensor as autosp

    model = split(ModelT(), rank.mesh(sp=2))
    model(**batches_of_t(1)[0]).loss.backward()
    return str(autosp.explain(model))


def test_explain_is_the_same_on_all_ranks_and_fits_a_terminal() -> None:
    texts = run_on_ranks(explained, n=2)
    assert texts[0] == texts[1]
    assert "@sp" in texts[0] and "all_to_all" in texts[0].replace("-", "_")
    assert re.search(r"model_t\.py:\d+", texts[0]), "a source line for each operation"
    assert "forward:" in texts[0] and "backward:" in texts[0]
    assert "blocks.0 and 1 more" in texts[0], "equal regions once, with a count"
    assert len(texts[0].splitlines()) < 120
    assert max(map(len, texts[0].splitlines())) <= 140


def verified(rank: Rank) -> str:
    import autosp_dtensor as autosp

    model = split(ModelT(), rank.mesh(sp=2))
    table = str(autosp.verify(model, **batches_of_t(1)[0]))
    assert all(parameter.grad is None for parameter in model.parameters())
    return table


def test_verify_compares_the_users_own_call_and_leaves_no_gradient() -> None:
    for table in run_on_ranks(verified, n=2):
        # 14 gradients, the logits and the loss at least.
        compared = re.search(r"(\d+) values compared, equal to one device", table)
        assert compared and int(compared[1]) >= 16, table
        assert "blocks.1.attention.k.weight" in table


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(1) * 0.1


class WithWrongRule(ModelT):
    """Its rule says that the running sum reads no other token."""

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        return self.running_sum(super().hidden(x, position_ids, mask))


def wrong_rule_verified(rank: Rank, spec: str) -> str:
    import autosp_dtensor as autosp

    model = WithWrongRule()
    model.running_sum = autosp.register_rule(running_sum, spec)
    return str(autosp.verify(split(model, rank.mesh(sp=2)), **batches_of_t(1)[0]))


def test_verify_finds_a_rule_that_is_wrong_and_passes_the_right_one() -> None:
    for table in run_on_ranks(wrong_rule_verified, "b [s] d -> b [s] d", n=2):
        assert ", equal to one device" in table
    for table in run_on_ranks(wrong_rule_verified, "b s d -> b s d", n=2):
        assert "NOT equal to one device" in table


def rows_read(rank: Rank) -> list[int]:
    import autosp_dtensor as autosp

    replicas, index = autosp.data_shard(rank.mesh(dp=2, sp=2))
    sampler = torch.utils.data.DistributedSampler(
        list(range(8)), num_replicas=replicas, rank=index, shuffle=False
    )
    assert autosp.data_shard(rank.mesh(sp=4)) == (1, 0)
    assert autosp.data_shard(rank.mesh(dp=4, sp=1)) == (4, rank.rank)
    return list(sampler)


def test_data_shard_gives_all_ranks_of_a_group_the_same_rows() -> None:
    assert run_on_ranks(rows_read) == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
