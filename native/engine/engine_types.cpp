#include <algorithm>

#include "engine/sha256.h"
#include "engine/shard_engine.h"

namespace meshnet {

const char * code_name(Code code) {
    switch (code) {
    case Code::ok:
        return "ok";
    case Code::invalid_argument:
        return "invalid_argument";
    case Code::illegal_cut:
        return "illegal_cut";
    case Code::not_found:
        return "not_found";
    case Code::resource_exhausted:
        return "resource_exhausted";
    case Code::failed_precondition:
        return "failed_precondition";
    case Code::no_rollback:
        return "no_rollback";
    case Code::engine_failure:
        return "engine_failure";
    }
    return "engine_failure";
}

size_t dtype_bytes(DType dtype) {
    switch (dtype) {
    case DType::f32:
    case DType::i32:
        return 4;
    case DType::f16:
    case DType::bf16:
        return 2;
    }
    return 0;
}

const char * dtype_name(DType dtype) {
    switch (dtype) {
    case DType::f32:
        return "f32";
    case DType::f16:
        return "f16";
    case DType::bf16:
        return "bf16";
    case DType::i32:
        return "i32";
    }
    return "?";
}

size_t TensorSpec::bytes_per_token() const {
    size_t bytes = dtype_bytes(dtype);
    for (const uint32_t extent : shape) {
        bytes *= extent;
    }
    return bytes;
}

size_t BoundarySchema::bytes_per_token() const {
    size_t bytes = 0;
    for (const auto & tensor : tensors) {
        bytes += tensor.bytes_per_token();
    }
    return bytes;
}

std::string BoundarySchema::digest() const {
    std::string text;
    for (const auto & tensor : tensors) {
        text += tensor.name + " " + dtype_name(tensor.dtype) + " ";
        for (size_t i = 0; i < tensor.shape.size(); ++i) {
            text += (i == 0 ? "" : "x") + std::to_string(tensor.shape[i]);
        }
        text += "\n";
    }
    return sha256_hex(text);
}

const BoundarySchema * EngineDescription::boundary_at(int32_t layer) const {
    if (layer == layers.start || layer == layers.end) {
        return layer == layers.start ? &boundary_in : &boundary_out;
    }
    const auto cut = std::find(legal_cuts.begin(), legal_cuts.end(), static_cast<uint32_t>(layer));
    return layer < 0 || cut == legal_cuts.end() ? nullptr : &cut_boundaries[cut - legal_cuts.begin()];
}

}  // namespace meshnet
