"""Expert-parallel layers: Hugging Face models whose experts live on different PEs, with no change to the model's code.

Importing this module is what registers the experts implementation `mori_ep` with transformers (extra `demo`), and
nothing else happens at import. Inside an initialised PE the whole of it is then

    model.set_experts_implementation("mori_ep")
    logits = model(my_part_of_the_batch).logits

Attention runs on each PE's own part of the batch, the experts run where they live. See `experts` for the rules.
"""

from mori_triton.layers._transformers import register_experts
from mori_triton.layers.experts import forward_idle, mori_ep_experts_forward
from mori_triton.layers.op_pool import close_ops, shared_ops
from mori_triton.layers.shards import ExpertShard, keep_local_experts
from mori_triton.layers.traffic import LayerTraffic, watch_traffic

__all__ = [
    "ExpertShard",
    "LayerTraffic",
    "close_ops",
    "forward_idle",
    "keep_local_experts",
    "mori_ep_experts_forward",
    "shared_ops",
    "watch_traffic",
]

register_experts("mori_ep", mori_ep_experts_forward)
