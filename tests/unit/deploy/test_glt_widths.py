"""The widths in GLT's YAML, against a store whose labels other processes have."""

import pytest
import torch
from support.graphs import ring
from support.shards import spread

import hoploom
from hoploom import ConfigError
from hoploom.deploy.glt_yaml import check_widths


@pytest.mark.parametrize("here", [[], [0]], ids=["no part here", "one part here"])
def test_the_labels_are_counted_wherever_they_are(here: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.deploy.glt_yaml.BLOCK", 7)
    data = ring(60)
    data.y = torch.arange(60) % 47
    store = spread(hoploom.from_pyg(data), 3, here=here)
    with hoploom.init(device="cpu") as context:
        check_widths(context, store, {"out_channel": 47})
        with pytest.raises(
            ConfigError, match="out_channel is 46 in the cluster's YAML, but the store's labels y need 47"
        ):
            check_widths(context, store, {"out_channel": 46})
