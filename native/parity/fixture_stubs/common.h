// Stands in for the header of llama.cpp's `common` library, of which upstream's fixture of tiny models needs nothing to
// make a model: what is declared here only lets the rest of that file compile. See ../arch_models.cpp.
#pragma once

#include <stdexcept>

#include "llama.h"

inline void common_init() {}

struct common_batch {
    explicit common_batch(llama_context *) {}
    void add(llama_token, llama_pos, llama_seq_id, bool) {}
    void clear() {}
    [[noreturn]] llama_batch_ext * get() {
        throw std::logic_error("upstream's tests are not run here");
    }
};
