import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
from tests.simulate import *
from tests import simulate

torch.manual_seed(0)
m = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
        tie_word_embeddings=False,
    )
).double()
ids = torch.randint(0, 64, (2, 16))
import inspect

print(inspect.signature(simulate.assert_program_equals_whole))
low = simulate.lower_call if hasattr(simulate, "lower_call") else None
L = simulate.assert_program_equals_whole(m, (ids,), n=2, labels=ids, tile=4)
from autosp_dtensor.lower import schedule

for path, r in L.root.walk():
    if "layers.0" in path or path == "model.layers.0":
        for kind, n in schedule(r.graph):
            f = n.meta["autosp"]
            print(
                kind,
                n.name,
                getattr(n.target, "__name__", n.target),
                f.turn,
                f.note,
                [str(a) for a in n.all_input_nodes],
            )
        break
