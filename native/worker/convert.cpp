#include "worker/convert.h"

namespace meshnet {

v1::DType to_wire(DType dtype) {
    switch (dtype) {
    case DType::f32:
        return v1::DTYPE_F32;
    case DType::f16:
        return v1::DTYPE_F16;
    case DType::bf16:
        return v1::DTYPE_BF16;
    case DType::i32:
        return v1::DTYPE_I32;
    }
    return v1::DTYPE_UNSPECIFIED;
}

v1::BoundarySchema to_wire(const BoundarySchema & schema) {
    v1::BoundarySchema wire;
    for (const auto & tensor : schema.tensors) {
        auto * spec = wire.add_tensors();
        spec->set_name(tensor.name);
        spec->set_dtype(to_wire(tensor.dtype));
        spec->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    }
    wire.set_digest(schema.digest());
    return wire;
}

void put_boundary(const BoundarySchema & schema, const std::vector<TensorData> & tensors, v1::StepFrame & frame) {
    frame.clear_boundary();
    for (size_t i = 0; i < schema.tensors.size(); ++i) {
        auto * tensor = frame.add_boundary();
        tensor->set_name(schema.tensors[i].name);
        tensor->set_dtype(to_wire(schema.tensors[i].dtype));
        tensor->mutable_shape()->Add(schema.tensors[i].shape.begin(), schema.tensors[i].shape.end());
        tensor->set_data(tensors[i].bytes.data(), tensors[i].bytes.size());
    }
}

std::vector<TensorData> take_boundary(v1::StepFrame & frame) {
    std::vector<TensorData> tensors;
    tensors.reserve(static_cast<size_t>(frame.boundary_size()));
    for (const auto & tensor : frame.boundary()) {
        const auto * data = reinterpret_cast<const uint8_t *>(tensor.data().data());
        tensors.push_back({tensor.name(), {data, data + tensor.data().size()}});
    }
    frame.clear_boundary();
    return tensors;
}

std::string hex_of(const std::string & bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string hex;
    hex.reserve(2 * bytes.size());
    for (const char c : bytes) {
        hex.push_back(digits[static_cast<unsigned char>(c) >> 4]);
        hex.push_back(digits[static_cast<unsigned char>(c) & 15]);
    }
    return hex;
}

std::string log_name(const std::string & session_id) {
    return hex_of(session_id.substr(0, 4));
}

}  // namespace meshnet
