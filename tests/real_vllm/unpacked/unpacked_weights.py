"""A plugin for tests: vLLM keeps the weights of linear layers where its checksums see them.

On a CPU vLLM packs them for its kernels and leaves empty parameters behind.
"""


def keep_weights():
    import vllm._custom_ops
    from vllm.model_executor.layers import utils

    vllm._custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *shapes: False
