// Between the engine's types and the wire's.
#pragma once

#include <string>
#include <vector>

#include "engine/shard_engine.h"
#include "meshnet/v1/shard.pb.h"

namespace meshnet {

v1::DType to_wire(DType dtype);
v1::BoundarySchema to_wire(const BoundarySchema & schema);

// Moves boundary tensors of `n` tokens between an engine's step or result and a frame.
void put_boundary(const BoundarySchema & schema, const std::vector<TensorData> & tensors, v1::StepFrame & frame);
std::vector<TensorData> take_boundary(v1::StepFrame & frame);

std::string hex_of(const std::string & bytes);

// How logs name a session: enough to tell it apart, too little to act on it (the id is a capability).
std::string log_name(const std::string & session_id);

}  // namespace meshnet
