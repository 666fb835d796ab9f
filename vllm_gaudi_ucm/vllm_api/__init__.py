"""The only room that imports vLLM's internals.

Each module takes its names from one part of vLLM, and its docstring says which of them are a documented extension point
(or public), and which are internal. A function here replaces a missing call of vLLM; it names its "Reason:" and the
condition for its removal ("Remove when:").

| module | part of vLLM |
|---|---|
| `versions` | the versions that we run with |
| `contracts` | the table of what we use of vLLM, and why some of it may be missing |
| `platforms` | the platform, and gaps in it |
| `engine_process` | start and end of an engine's process |
| `child_watch` | engines and workers that are stopped, or wait for a dead one |
| `engine_death`, `server_end` | callers and servers whose engine has died |
| `log_lines` | lines of the log that are untrue here |
| `engine` | engines, their arguments, their logs |
| `metrics` | statistics and their loggers |
| `scheduling`, `blocks` | the scheduler; operations on its blocks and requests |
| `steps` | messages between scheduler and worker |
| `worker` | the worker's interface |
| `distributed` | groups of workers, and the collectives between them |
| `stage_layers` | layers of a block on each stage of a pipeline |
| `rotary`, `deepstack` | positions with several axes; levels of an encoder that the first layers read |
| `loading`, `positions` | models with every weight from their checkpoint; tables of positions |
| `model`, `attention`, `kv_cache` | layers, attention backends, the cache's description |
| `cache_options` | options of the cache that the platform sets |
| `state_layers` | layers with a state, and what they keep |
| `quantisation` | methods of quantised weights |
| `moe` | layers with experts, and their routers |
| `pooling` | poolers, and what they read of a step |
| `media` | pictures and videos of requests, and errors of those that cannot be read |
| `multimodal` | pictures of prompts: their places, the budget of their embeddings, inputs of encoders |
| `draft_heads` | what a draft head takes from its model: states of layers, embeddings, the output layer |
| `grid_encoder`, `patch_encoder`, `tile_encoder` | encoders of pictures as grids, patches and tiles, at padded sizes |
| `soft_token_encoder`, `layer_embeddings` | Gemma 4's encoder of pictures; embeddings that its layers read |
| `sequence_numbers` | sequences of an encoder's rows, in one shape |
| `indexer` | the indexer of models whose rows choose tokens |
| `lora` | adapters: layers, their weights, the manager that loads them |
| `profiling` | profilers of a worker |
| `sampling` | samplers, logits processors, grammars |
| `kv_transfer`, `kv_offload` | KV connectors; offloading to the host |
| `nixl`, `lmcache` | connectors for NIXL and LMCache |

Our platform class is loaded while vLLM is being imported. What it needs at module level is in `versions`, `platforms`,
`engine_process`, `child_watch`, `server_end`, `log_lines`, `blocks` and `cache_options`; the other modules import parts
of vLLM that need a platform.
"""
