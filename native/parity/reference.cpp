// Greedy reference with nothing but llama.h, so that it builds from the unpatched and the patched tree alike.
//
//   meshnet-reference MODEL THREADS CONTEXT CHUNK NEW_TOKENS TOKEN...
//
// Prefills the prompt in chunks of CHUNK tokens, then decodes greedily. Prints one line per step: the chosen token and
// a 64-bit FNV-1a hash of the logits row that chose it.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static uint64_t hash_row(const float * row, size_t n) {
    uint64_t hash = 0xcbf29ce484222325ULL;
    const auto * bytes = reinterpret_cast<const unsigned char *>(row);
    for (size_t i = 0; i < n * sizeof(float); ++i) {
        hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
    }
    return hash;
}

static bool decode(llama_context * context, llama_batch & batch, const std::vector<llama_token> & tokens, size_t first,
                   size_t last, bool want_logits) {
    batch.n_tokens = static_cast<int32_t>(last - first);
    for (size_t i = first; i < last; ++i) {
        const size_t k = i - first;
        batch.token[k] = tokens[i];
        batch.pos[k] = static_cast<llama_pos>(i);
        batch.n_seq_id[k] = 1;
        batch.seq_id[k][0] = 0;
        batch.logits[k] = want_logits && i + 1 == last;
    }
    return llama_decode(context, batch) == 0;
}

int main(int argc, char ** argv) {
    if (argc < 7) {
        fprintf(stderr, "usage: %s MODEL THREADS CONTEXT CHUNK NEW_TOKENS TOKEN...\n", argv[0]);
        return 2;
    }
    const int threads = atoi(argv[2]);
    const size_t n_context = strtoull(argv[3], nullptr, 10);
    const size_t chunk = strtoull(argv[4], nullptr, 10);
    const size_t n_new = strtoull(argv[5], nullptr, 10);
    std::vector<llama_token> tokens;
    for (int i = 6; i < argc; ++i) {
        tokens.push_back(atoi(argv[i]));
    }
    const size_t n_prompt = tokens.size();
    if (chunk == 0 || n_prompt + n_new > n_context) {
        fprintf(stderr, "chunk must not be 0 and prompt + new tokens must fit the context\n");
        return 2;
    }

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(n_context);
    params.n_batch = params.n_ubatch = static_cast<uint32_t>(chunk);
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = threads;
    params.swa_full = false;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) {
        fprintf(stderr, "no context for %s\n", argv[1]);
        return 1;
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(static_cast<int32_t>(chunk), 0, 1);

    size_t done = 0;
    for (size_t step = 0; step < n_new; ++step) {
        while (done < tokens.size()) {
            const size_t last = std::min(done + chunk, tokens.size());
            if (!decode(context, batch, tokens, done, last, last == tokens.size())) {
                fprintf(stderr, "decode failed at position %zu\n", done);
                return 1;
            }
            done = last;
        }
        const float * row = llama_get_logits_ith(context, -1);
        const auto token = static_cast<llama_token>(std::max_element(row, row + n_vocab) - row);
        printf("%d %016" PRIx64 "\n", token, hash_row(row, static_cast<size_t>(n_vocab)));
        tokens.push_back(token);
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
