"""Clients that know other backends, written down: what they send, in what order, and how they read the answers, so that
an answer which they would stumble over fails here too. Messages are theirs, tensor for tensor; the code is not.

    text       end_to_end_grpc_client.py of triton_backend/inflight_batcher_llm/client, NVIDIA/TensorRT-LLM, 2a9abd95
    tokens     inflight_batcher_llm_client.py beside it, 000a01de
    vllm       samples/client.py, triton-inference-server/vllm_backend, a2c7e767
    connector  llama_index/llms/nvidia_triton/utils.py of llama-index-llms-nvidia-triton 0.6.0, and
               langchain_nvidia_trt/llms.py of langchain-nvidia-trt 0.0.1rc0 (scripts/test-clients runs both themselves)
"""
