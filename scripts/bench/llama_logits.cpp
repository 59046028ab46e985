// Logits of llama.cpp behind every token of some texts, for scripts/bench/quality: llama_logits MODEL.gguf THREADS
// Reads texts until the input ends, each a count and so many token ids; writes each text's rows of the vocabulary's logits.
// All are 32-bit little endian, whole numbers and floats.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static void require(bool holds, const char* what) {
    if (!holds) {
        fprintf(stderr, "llama_logits: %s\n", what);
        exit(1);
    }
}

static void compute(llama_context* context, const std::vector<int32_t>& tokens, int32_t vocab_size) {
    llama_memory_clear(llama_get_memory(context), true);
    const int32_t count = static_cast<int32_t>(tokens.size());
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int32_t i = 0; i < count; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    require(llama_decode(context, batch) == 0, "a text cannot be computed");
    for (int32_t i = 0; i < count; i++) {
        const float* row = llama_get_logits_ith(context, i);
        require(row && fwrite(row, sizeof(float), vocab_size, stdout) == size_t(vocab_size), "no logits");
    }
    llama_batch_free(batch);
}

int main(int argc, char** argv) {
    require(argc == 3, "usage: llama_logits MODEL.gguf THREADS");
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    require(model, "the model cannot be read");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 1024;
    params.n_threads = params.n_threads_batch = atoi(argv[2]);
    llama_context* context = llama_init_from_model(model, params);
    require(context, "there is no room for the model");
    const int32_t vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    uint32_t count;
    while (fread(&count, sizeof(count), 1, stdin) == 1) {
        require(count > 0 && count <= params.n_ctx, "a text has to have 1 to 1024 tokens");
        std::vector<int32_t> tokens(count);
        require(fread(tokens.data(), sizeof(int32_t), count, stdin) == count, "a text is cut off");
        compute(context, tokens, vocab_size);
    }
    llama_free(context);
    llama_model_free(model);
}
