// The contract between a shard worker and whatever computes a range of layers.
//
// One engine holds one loaded range [start, end) of one artifact and the Hot KV of its sequences. It is used from
// one thread at a time (the worker's engine thread), except describe() and the vocabulary functions, which are
// const and safe from any thread. Nothing here throws or aborts on bad input: every failure is a Status.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace meshnet {

enum class Code {
    ok,
    invalid_argument,     // malformed input: shapes, ids, positions
    illegal_cut,          // the graph does not allow this range
    not_found,            // no such file or sequence
    resource_exhausted,   // no free sequence, cache full
    failed_precondition,  // position does not follow the cache
    no_rollback,          // the model cannot return to that position
    engine_failure,       // the backend failed
};

const char * code_name(Code code);  // as spelled above, e.g. "illegal_cut"

struct [[nodiscard]] Status {
    Code code = Code::ok;
    std::string message;

    bool ok() const {
        return code == Code::ok;
    }
    static Status success() {
        return {};
    }
};

// Half-open range of layers.
struct LayerRange {
    int32_t start = 0;
    int32_t end = 0;

    bool operator==(const LayerRange & other) const {
        return start == other.start && end == other.end;
    }
};

enum class DType { f32, f16, bf16, i32 };

size_t dtype_bytes(DType dtype);
const char * dtype_name(DType dtype);  // "f32", "f16", "bf16", "i32"

// One tensor of a boundary; shape is per token, fastest-moving dimension first.
struct TensorSpec {
    std::string name;
    DType dtype = DType::f32;
    std::vector<uint32_t> shape;

    size_t bytes_per_token() const;
};

// What crosses a cut; empty at the model's entrance and exit.
struct BoundarySchema {
    std::vector<TensorSpec> tensors;

    size_t bytes_per_token() const;
    // SHA-256 (hex) of "name dtype d0xd1…\n" per tensor.
    std::string digest() const;
};

// Data of one boundary tensor for n tokens, token outermost.
struct TensorData {
    std::string name;
    std::vector<uint8_t> bytes;
};

struct EngineConfig {
    std::string model_path;
    LayerRange layers;               // end == 0 means to the last layer
    uint32_t session_tokens = 4096;  // Hot KV tokens per sequence
    uint32_t sequences = 4;          // sequence slots
    uint32_t step_tokens = 512;      // most tokens in one execute()
    int32_t threads = 0;             // 0 means all cores
    std::string kv_type_k = "f16";   // ggml type names
    std::string kv_type_v = "f16";
    bool flash_attention = true;
    uint64_t most_copied_bytes = 0;  // weights up to this are copied; more than that are mapped from the file
    uint32_t rollback_tokens = 0;    // recurrent-state snapshots kept for rollback
    uint32_t step_outputs = 16;      // most logits rows of one execute()
    bool find_cuts = true;           // describe() tells legal and illegal cuts, which takes a dry run for each layer
};

struct EngineDescription {
    std::string engine;  // "llama" or "test"
    std::string architecture;
    std::string model_name;
    uint32_t n_layer = 0;
    uint32_t n_vocab = 0;
    uint32_t n_ctx_train = 0;
    LayerRange layers;
    BoundarySchema boundary_in;
    BoundarySchema boundary_out;
    bool needs_token_ids = false;
    std::vector<uint32_t> legal_cuts;                            // start < k < end
    std::vector<BoundarySchema> cut_boundaries;                  // what crosses each of them, in the same order
    std::vector<std::pair<uint32_t, std::string>> illegal_cuts;  // the others, with the reason
    uint32_t session_tokens = 0;
    uint32_t sequences = 0;
    uint32_t step_tokens = 0;
    uint32_t step_outputs = 0;
    uint64_t kv_bytes_per_token = 0;
    uint64_t weight_bytes = 0;
    uint64_t copied_bytes = 0;  // weights in memory of the engine's own, not mapped from the file
    uint64_t kv_bytes = 0;
    uint64_t compute_bytes = 0;
    std::string compatibility_id;
    std::string build_id;
    std::string chat_template;
    std::string bos_token;
    std::string eos_token;
    bool add_bos = false;
    bool can_rollback = false;

    bool is_head() const {
        return layers.start == 0;
    }
    bool is_tail() const {
        return layers.end == static_cast<int32_t>(n_layer);
    }
    // What crosses before `layer`; null if the range neither begins nor ends nor can be cut there.
    const BoundarySchema * boundary_at(int32_t layer) const;
};

// Consecutive tokens of one sequence. tokens are always given; boundary holds boundary_in's tensors for them
// (empty at the head).
struct Step {
    int32_t sequence = -1;
    uint32_t position = 0;  // of tokens[0]; must equal the sequence's cached length
    std::vector<int32_t> tokens;
    std::vector<TensorData> boundary;
    std::vector<uint32_t> logits_at;  // tail: indices into tokens whose logits are wanted
};

struct StepResult {
    std::vector<TensorData> boundary;        // not the tail: boundary_out's tensors for all tokens
    std::vector<std::vector<float>> logits;  // the tail: n_vocab floats per entry of logits_at
};

class ShardEngine {
  public:
    virtual ~ShardEngine() = default;

    virtual const EngineDescription & describe() const = 0;

    // Keeps the calling thread, which is to call execute() from now on, on the core that the engine's own compute
    // threads leave to it; does nothing if there is none.
    virtual void bind_thread() const {}

    // Takes a free sequence slot with an empty cache.
    virtual Status open_sequence(int32_t & sequence) = 0;
    // Frees the slot and its cache. Closing an unknown slot is not_found.
    virtual Status close_sequence(int32_t sequence) = 0;
    // Drops cached positions >= position. Rolling back to the cached length does nothing.
    virtual Status rollback(int32_t sequence, uint32_t position) = 0;

    // Computes the steps of several different sequences together. The sum of their tokens is at most
    // describe().step_tokens. On failure no sequence of the batch has advanced.
    virtual Status execute(const std::vector<Step> & steps, std::vector<StepResult> & results) = 0;

    virtual Status tokenize(std::string_view text, bool add_special, bool parse_special,
                            std::vector<int32_t> & tokens) const = 0;
    // Bytes of one token; empty for control tokens.
    virtual Status piece(int32_t token, std::string & bytes) const = 0;
    virtual bool is_eog(int32_t token) const = 0;
};

// Loads the range with llama.cpp. On failure `engine` is empty and the status says which file and why.
Status make_llama_engine(const EngineConfig & config, std::unique_ptr<ShardEngine> & engine);

// What a range reads, told by the model's graph before any weight of it is there.
struct RangeNeeds {
    uint32_t n_layer = 0;
    LayerRange layers;
    std::vector<std::string> shared_tensors;  // of no layer: embedding, head, tables that several layers read
};

// Reads metadata alone (the header of every file of the model; weights may be holes). Refuses as loading would.
Status llama_range_needs(const EngineConfig & config, RangeNeeds & needs);

// A deterministic engine for tests of everything around it: 256 byte tokens plus BOS and EOS, any number of layers,
// logits that depend on every token of the prefix and on every layer of the route. `model_path` is ignored but
// "test:<n_layer>[:<us_per_layer_token>[:<boundary_tensors>]]" sets its size, speed (busy compute time) and whether
// an i32 sideband crosses the cuts too (boundary_tensors = 2). See test_engine.cpp.
Status make_test_engine(const EngineConfig & config, std::unique_ptr<ShardEngine> & engine);

}  // namespace meshnet
