// Stands in while there is no llama_engine.cpp in the tree.
#include "engine/shard_engine.h"

namespace meshnet {

Status make_llama_engine(const EngineConfig & config, std::unique_ptr<ShardEngine> & engine) {
    engine.reset();
    return {Code::engine_failure,
            "this worker was built without the llama.cpp engine; cannot load " + config.model_path};
}

Status llama_range_needs(const EngineConfig & config, RangeNeeds &) {
    return {Code::engine_failure,
            "this worker was built without the llama.cpp engine; cannot read " + config.model_path};
}

}  // namespace meshnet
