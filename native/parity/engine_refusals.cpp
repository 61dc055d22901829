// Bad input to the llama engine: a typed status, nothing advances, nothing aborts.
#include <cstring>
#include <fstream>
#include <limits>

#include "parity/engine_fixture.h"

namespace meshnet::parity {
namespace {

class Refusals : public testing::TestWithParam<std::string> {
  protected:
    void SetUp() override {
        EngineConfig config = tiny_config(GetParam());
        config.sequences = 2;
        config.session_tokens = 256;
        config.step_tokens = 64;
        config.step_outputs = 4;
        ASSERT_OK(make_llama_engine(config, whole_));
        const auto & legal = whole_->describe().legal_cuts;
        ASSERT_GE(legal.size(), 2U);
        config.layers = {static_cast<int32_t>(legal.front()), static_cast<int32_t>(legal.back())};
        ASSERT_OK(make_llama_engine(config, middle_));
        config.layers = {static_cast<int32_t>(legal.back()), 0};
        ASSERT_OK(make_llama_engine(config, tail_));
        ASSERT_OK(whole_->open_sequence(whole_sequence_));
        ASSERT_OK(middle_->open_sequence(middle_sequence_));
        ASSERT_OK(tail_->open_sequence(tail_sequence_));
    }

    // A good step of n tokens, with a boundary of ones where the engine needs one.
    static Step good(const ShardEngine & engine, int32_t sequence, uint32_t n, uint32_t position = 0) {
        Step step;
        step.sequence = sequence;
        step.position = position;
        step.tokens = make_prompt(engine, n, 1);
        for (const TensorSpec & spec : engine.describe().boundary_in.tensors) {
            TensorData data = {spec.name, std::vector<uint8_t>(spec.bytes_per_token() * n)};
            const float one = 1.0F;
            for (size_t i = 0; i < data.bytes.size(); i += sizeof(one)) {
                std::memcpy(data.bytes.data() + i, &one, sizeof(one));
            }
            step.boundary.push_back(std::move(data));
        }
        return step;
    }

    static void expect(ShardEngine & engine, const std::vector<Step> & steps, Code code) {
        std::vector<StepResult> results;
        const Status status = engine.execute(steps, results);
        EXPECT_EQ(status.code, code) << code_name(status.code) << ": " << status.message;
        EXPECT_FALSE(status.message.empty());
    }

    // The engine still works, from the position given.
    static void expect_usable(ShardEngine & engine, int32_t sequence, uint32_t position) {
        std::vector<StepResult> results;
        ASSERT_OK(engine.execute({good(engine, sequence, 3, position)}, results));
    }

    std::unique_ptr<ShardEngine> whole_;
    std::unique_ptr<ShardEngine> middle_;
    std::unique_ptr<ShardEngine> tail_;
    int32_t whole_sequence_ = -1;
    int32_t middle_sequence_ = -1;
    int32_t tail_sequence_ = -1;
};

TEST_P(Refusals, NothingAtAll) {
    std::vector<StepResult> results;
    ASSERT_OK(whole_->execute({}, results));
    EXPECT_TRUE(results.empty());
}

TEST_P(Refusals, WrongPositions) {
    for (const uint32_t position : {1U, 7U, 255U, 256U, 4294967295U}) {
        expect(*middle_, {good(*middle_, middle_sequence_, 2, position)}, Code::failed_precondition);
    }
    expect_usable(*middle_, middle_sequence_, 0);
    for (const uint32_t position : {0U, 2U, 4U}) {
        expect(*middle_, {good(*middle_, middle_sequence_, 2, position)}, Code::failed_precondition);
    }
    expect_usable(*middle_, middle_sequence_, 3);
}

TEST_P(Refusals, TokensOutOfRange) {
    const auto n_vocab = static_cast<int32_t>(whole_->describe().n_vocab);
    for (const int32_t token : {-1, n_vocab, n_vocab + 1, std::numeric_limits<int32_t>::min(), 2147483647}) {
        for (const auto & [engine, sequence] :
             {std::make_pair(whole_.get(), whole_sequence_), std::make_pair(middle_.get(), middle_sequence_)}) {
            Step step = good(*engine, sequence, 3);
            step.tokens[1] = token;
            expect(*engine, {step}, Code::invalid_argument);
            std::string bytes;
            EXPECT_EQ(engine->piece(token, bytes).code, Code::invalid_argument);
            EXPECT_FALSE(engine->is_eog(token));
        }
    }
    expect_usable(*whole_, whole_sequence_, 0);
}

TEST_P(Refusals, WrongBoundaries) {
    const Step right = good(*middle_, middle_sequence_, 3);
    Step step = right;
    step.boundary.clear();
    expect(*middle_, {step}, Code::invalid_argument);
    step = right;
    step.boundary.push_back(step.boundary.front());
    expect(*middle_, {step}, Code::invalid_argument);
    for (const int change : {-4, -1, 1, 4, 100'000}) {
        step = right;
        step.boundary.front().bytes.resize(step.boundary.front().bytes.size() + static_cast<size_t>(change));
        expect(*middle_, {step}, Code::invalid_argument);
    }
    step = right;
    step.boundary.front().bytes.clear();
    expect(*middle_, {step}, Code::invalid_argument);
    step = right;
    step.boundary.front().name = "another";
    expect(*middle_, {step}, Code::invalid_argument);
    step = good(*whole_, whole_sequence_, 3);
    step.boundary = right.boundary;
    expect(*whole_, {step}, Code::invalid_argument);
    expect_usable(*middle_, middle_sequence_, 0);
}

// Whatever a neighbour sends is computed or refused. Values that are no numbers must not lead selections astray.
TEST_P(Refusals, BoundariesOfAnyValue) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    constexpr float inf = std::numeric_limits<float>::infinity();
    constexpr float max = std::numeric_limits<float>::max();
    for (const auto & [engine, sequence] :
         {std::make_pair(middle_.get(), middle_sequence_), std::make_pair(tail_.get(), tail_sequence_)}) {
        for (const float value : {nan, inf, -inf, max, -max, 0.0F, 1e-45F}) {
            for (const size_t stride : {1U, 7U}) {
                Step step = good(*engine, sequence, 40);
                auto & bytes = step.boundary.front().bytes;
                for (size_t i = 0; i + sizeof(value) <= bytes.size(); i += stride * sizeof(value)) {
                    std::memcpy(bytes.data() + i, &value, sizeof(value));
                }
                if (engine->describe().is_tail()) {
                    step.logits_at = {39};
                }
                std::vector<StepResult> results;
                const Status status = engine->execute({step}, results);
                EXPECT_TRUE(status.ok() || status.code == Code::invalid_argument) << status.message;
                ASSERT_OK(engine->rollback(sequence, 0));
            }
        }
        // And no trace of it is left.
        std::vector<StepResult> after;
        ASSERT_OK(engine->execute({good(*engine, sequence, 3)}, after));
        int32_t other = -1;
        ASSERT_OK(engine->open_sequence(other));
        std::vector<StepResult> fresh;
        ASSERT_OK(engine->execute({good(*engine, other, 3)}, fresh));
        if (!engine->describe().is_tail()) {
            EXPECT_EQ(after.front().boundary.front().bytes, fresh.front().boundary.front().bytes);
        }
    }
}

TEST_P(Refusals, TooMuch) {
    expect(*whole_, {good(*whole_, whole_sequence_, 65)}, Code::invalid_argument);
    int32_t second = -1;
    ASSERT_OK(whole_->open_sequence(second));
    expect(*whole_, {good(*whole_, whole_sequence_, 40), good(*whole_, second, 25)}, Code::invalid_argument);
    Step step = good(*whole_, whole_sequence_, 10);
    step.logits_at = {0, 1, 2, 3, 4};
    expect(*whole_, {step}, Code::invalid_argument);
    expect_usable(*whole_, whole_sequence_, 0);
    // The session holds 256 tokens.
    for (uint32_t position = 3; position < 243; position += 60) {
        std::vector<StepResult> results;
        ASSERT_OK(whole_->execute({good(*whole_, whole_sequence_, 60, position)}, results));
    }
    expect(*whole_, {good(*whole_, whole_sequence_, 14, 243)}, Code::resource_exhausted);
    std::vector<StepResult> results;
    ASSERT_OK(whole_->execute({good(*whole_, whole_sequence_, 13, 243)}, results));
    expect(*whole_, {good(*whole_, whole_sequence_, 1, 256)}, Code::resource_exhausted);
}

TEST_P(Refusals, NothingAdvancesIfOneStepIsBad) {
    int32_t second = -1;
    ASSERT_OK(middle_->open_sequence(second));
    expect(*middle_, {good(*middle_, middle_sequence_, 3), good(*middle_, second, 3, 1)}, Code::failed_precondition);
    expect_usable(*middle_, middle_sequence_, 0);
    expect_usable(*middle_, second, 0);
}

TEST_P(Refusals, StepsThatAreNone) {
    Step step = good(*whole_, whole_sequence_, 3);
    step.tokens.clear();
    expect(*whole_, {step}, Code::invalid_argument);
    expect(*whole_, {good(*whole_, whole_sequence_, 3), good(*whole_, whole_sequence_, 3)}, Code::invalid_argument);
    for (const std::vector<uint32_t> & logits_at :
         {std::vector<uint32_t>{3}, {1, 0}, {1, 1}, {4294967295U}, {0, 4294967295U}}) {
        step = good(*whole_, whole_sequence_, 3);
        step.logits_at = logits_at;
        expect(*whole_, {step}, Code::invalid_argument);
    }
    step = good(*middle_, middle_sequence_, 3);
    step.logits_at = {2};
    expect(*middle_, {step}, Code::invalid_argument);
    expect_usable(*whole_, whole_sequence_, 0);
}

TEST_P(Refusals, SequencesThatAreNotOpen) {
    for (const int32_t sequence : {-1, 1, 2, 1000, std::numeric_limits<int32_t>::min(), 2147483647}) {
        expect(*whole_, {good(*whole_, sequence, 1)}, Code::not_found);
        EXPECT_EQ(whole_->rollback(sequence, 0).code, Code::not_found);
        EXPECT_EQ(whole_->close_sequence(sequence).code, Code::not_found);
    }
    ASSERT_OK(whole_->close_sequence(whole_sequence_));
    expect(*whole_, {good(*whole_, whole_sequence_, 1)}, Code::not_found);
    EXPECT_EQ(whole_->close_sequence(whole_sequence_).code, Code::not_found);
}

TEST_P(Refusals, NoMoreSlots) {
    int32_t sequence = -1;
    ASSERT_OK(whole_->open_sequence(sequence));
    EXPECT_EQ(whole_->open_sequence(sequence).code, Code::resource_exhausted);
    ASSERT_OK(whole_->close_sequence(whole_sequence_));
    ASSERT_OK(whole_->open_sequence(sequence));
    EXPECT_EQ(sequence, whole_sequence_);
}

TEST_P(Refusals, RollbackToTheFuture) {
    expect_usable(*whole_, whole_sequence_, 0);
    EXPECT_EQ(whole_->rollback(whole_sequence_, 4).code, Code::failed_precondition);
    EXPECT_EQ(whole_->rollback(whole_sequence_, 4294967295U).code, Code::failed_precondition);
    ASSERT_OK(whole_->rollback(whole_sequence_, 3));
    expect_usable(*whole_, whole_sequence_, 3);
}

INSTANTIATE_TEST_SUITE_P(Models, Refusals, testing::Values("llama", "deepseek4", "glm-dsa", "qwen35moe"), name_of);

class Loading : public testing::Test {
  protected:
    static Status load(const EngineConfig & config) {
        std::unique_ptr<ShardEngine> engine;
        Status status = make_llama_engine(config, engine);
        EXPECT_EQ(status.ok(), engine != nullptr);
        EXPECT_EQ(status.ok(), status.message.empty()) << status.message;
        return status;
    }

    static std::string contents() {
        std::ifstream file(model_path("llama"), std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(file), {});
    }

    // A file of these bytes.
    static EngineConfig file_of(const std::string & bytes) {
        EngineConfig config = tiny_config("llama");
        config.model_path = testing::TempDir() + "/changed.gguf";
        std::ofstream(config.model_path, std::ios::binary) << bytes;
        return config;
    }
};

TEST_F(Loading, FilesThatAreNoModels) {
    EngineConfig config = tiny_config("llama");
    config.model_path = "/nowhere/model.gguf";
    EXPECT_EQ(load(config).code, Code::not_found);
    config.model_path = "/";
    EXPECT_EQ(load(config).code, Code::not_found);
    EXPECT_EQ(load(file_of("")).code, Code::invalid_argument);
    EXPECT_EQ(load(file_of("not a model")).code, Code::invalid_argument);
    const std::string whole = contents();
    for (const size_t n : {size_t{4}, size_t{24}, size_t{1000}, size_t{1'000'000}, whole.size() - 1'000'000}) {
        EXPECT_EQ(load(file_of(whole.substr(0, n))).code, Code::invalid_argument) << n << " bytes";
    }
}

TEST_F(Loading, RangesThatAreNone) {
    EngineConfig config = tiny_config("llama");
    for (const LayerRange range :
         {LayerRange{0, 7}, {6, 7}, {3, 3}, {4, 2}, {-1, 3}, {6, 0}, {7, 0}, {0, 2147483647}, {-5, 0}, {2, -1}}) {
        config.layers = range;
        EXPECT_EQ(load(config).code, Code::illegal_cut) << range.start << ":" << range.end;
    }
}

TEST_F(Loading, SettingsThatMakeNoSense) {
    const EngineConfig good = tiny_config("llama");
    EngineConfig config = good;
    for (const uint32_t n : {0U, 131'073U, 4'294'967'295U}) {
        config = good;
        config.session_tokens = n;
        EXPECT_EQ(load(config).code, Code::invalid_argument) << n;
    }
    for (const uint32_t n : {0U, 100'000U, 4'294'967'295U}) {
        config = good;
        config.sequences = n;
        EXPECT_EQ(load(config).code, Code::invalid_argument) << n;
    }
    config = good;
    config.step_tokens = 0;
    EXPECT_EQ(load(config).code, Code::invalid_argument);
    config = good;
    config.step_outputs = 0;
    EXPECT_EQ(load(config).code, Code::invalid_argument);
}

// A cache of every type either loads and computes, or is refused.
TEST_F(Loading, CacheTypes) {
    for (const bool flash_attention : {true, false}) {
        for (const std::string type :
             {"f32",     "f16",   "bf16",  "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q4_K",     "q8_K",
              "iq2_xxs", "tq1_0", "mxfp4", "i8",   "i32",  "i64",  "f64",  "q8_1", "",       "nonsense", "F16"}) {
            SCOPED_TRACE(type + (flash_attention ? " with" : " without") + " flash attention");
            EngineConfig config = tiny_config("llama");
            config.kv_type_k = type;
            config.kv_type_v = type;
            config.flash_attention = flash_attention;
            std::unique_ptr<ShardEngine> engine;
            const Status status = make_llama_engine(config, engine);
            if (!status.ok()) {
                EXPECT_EQ(status.code, Code::invalid_argument) << status.message;
                EXPECT_FALSE(flash_attention && (type == "f16" || type == "q8_0")) << status.message;
                continue;
            }
            int32_t sequence = -1;
            ASSERT_OK(engine->open_sequence(sequence));
            Step step;
            step.sequence = sequence;
            step.tokens = make_prompt(*engine, 10, 1);
            step.logits_at = {9};
            std::vector<StepResult> results;
            ASSERT_OK(engine->execute({step}, results));
        }
    }
}

}  // namespace
}  // namespace meshnet::parity
