// The deterministic engine: any split gives the same output, anything wrong gives another.
#include <gtest/gtest.h>

#include "tests/worker_support.h"

namespace meshnet {
namespace {

using test::make_engine;

// Logits after every token of `tokens`, computed by consecutive shards cut at `cuts`, in steps of `chunk` tokens.
std::vector<std::vector<float>> run_split(const std::vector<int32_t> & cuts, const std::vector<int32_t> & tokens,
                                          size_t chunk, const std::string & model = "test:6") {
    std::vector<std::unique_ptr<ShardEngine>> shards;
    std::vector<int32_t> sequences;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        shards.push_back(make_engine(model, {cuts[i], cuts[i + 1]}));
        sequences.push_back(-1);
        EXPECT_TRUE(shards.back()->open_sequence(sequences.back()).ok());
    }
    std::vector<std::vector<float>> logits;
    for (size_t at = 0; at < tokens.size(); at += chunk) {
        Step step;
        step.position = static_cast<uint32_t>(at);
        step.tokens.assign(tokens.begin() + at, tokens.begin() + std::min(at + chunk, tokens.size()));
        for (size_t i = 0; i < shards.size(); ++i) {
            step.sequence = sequences[i];
            if (i + 1 == shards.size()) {
                for (uint32_t t = 0; t < step.tokens.size(); ++t) {
                    step.logits_at.push_back(t);
                }
            }
            std::vector<StepResult> results;
            const auto status = shards[i]->execute({step}, results);
            EXPECT_TRUE(status.ok()) << status.message;
            step.boundary = results[0].boundary;
            logits.insert(logits.end(), results[0].logits.begin(), results[0].logits.end());
        }
    }
    return logits;
}

const std::vector<int32_t> prompt = {256, 'H', 'e', 'l', 'l', 'o', ',', ' ', 'w', 'o', 'r', 'l', 'd'};

TEST(TestEngine, EverySplitGivesTheSameLogits) {
    const auto whole = run_split({0, 6}, prompt, prompt.size());
    ASSERT_EQ(whole.size(), prompt.size());
    for (const std::vector<int32_t> & cuts :
         {std::vector<int32_t>{0, 1, 6}, {0, 3, 6}, {0, 5, 6}, {0, 2, 4, 6}, {0, 1, 2, 3, 4, 5, 6}}) {
        for (const size_t chunk : {size_t{1}, size_t{4}, prompt.size()}) {
            EXPECT_EQ(run_split(cuts, prompt, chunk), whole);
            EXPECT_EQ(run_split(cuts, prompt, chunk, "test:6:0:2"), whole);
        }
    }
}

TEST(TestEngine, AMissingLayerATokenOrAPlaceChangesTheOutput) {
    const auto whole = run_split({0, 6}, prompt, 1);
    EXPECT_NE(run_split({0, 5}, prompt, 1, "test:5").back(), whole.back());
    auto other = prompt;
    other[1] = 'J';
    EXPECT_NE(run_split({0, 6}, other, 1).back(), whole.back());
    auto swapped = prompt;
    std::swap(swapped[1], swapped[2]);
    EXPECT_NE(run_split({0, 6}, swapped, 1).back(), whole.back());
}

TEST(TestEngine, RollbackForgetsExactlyWhatCameAfter) {
    const auto whole = run_split({0, 6}, prompt, 1);
    auto engine = make_engine("test:6", {0, 6});
    int32_t sequence = -1;
    ASSERT_TRUE(engine->open_sequence(sequence).ok());
    std::vector<StepResult> results;
    ASSERT_TRUE(engine->execute({{sequence, 0, {1, 2, 3, 4}, {}, {}}}, results).ok());
    ASSERT_TRUE(engine->rollback(sequence, 0).ok());
    ASSERT_TRUE(engine->execute({{sequence, 0, {prompt[0], prompt[1], 9, 9}, {}, {}}}, results).ok());
    ASSERT_TRUE(engine->rollback(sequence, 2).ok());
    Step rest{sequence, 2, {prompt.begin() + 2, prompt.end()}, {}, {static_cast<uint32_t>(prompt.size()) - 3}};
    ASSERT_TRUE(engine->execute({rest}, results).ok());
    EXPECT_EQ(results[0].logits[0], whole.back());
}

TEST(TestEngine, BadInputIsAStatus) {
    auto tail = make_engine("test:6", {3, 6}, 16, 2);
    int32_t sequence = -1;
    std::vector<StepResult> results;
    EXPECT_EQ(tail->execute({{0, 0, {1}, {}, {}}}, results).code, Code::not_found);
    ASSERT_TRUE(tail->open_sequence(sequence).ok());
    const std::vector<uint8_t> state(64, 0);
    const auto run = [&](Step step) { return tail->execute({std::move(step)}, results).code; };
    EXPECT_EQ(run({sequence, 0, {1}, {{"state", state}}, {0}}), Code::ok);
    EXPECT_EQ(run({sequence, 0, {1}, {{"state", state}}, {}}), Code::failed_precondition);
    EXPECT_EQ(run({sequence, 1, {258}, {{"state", state}}, {}}), Code::invalid_argument);
    EXPECT_EQ(run({sequence, 1, {1}, {}, {}}), Code::invalid_argument);
    EXPECT_EQ(run({sequence, 1, {1, 2}, {{"state", state}}, {}}), Code::invalid_argument);
    EXPECT_EQ(run({sequence, 1, {1}, {{"other", state}}, {}}), Code::invalid_argument);
    EXPECT_EQ(run({sequence, 1, {1}, {{"state", std::vector<uint8_t>(64, 0xff)}}, {}}), Code::invalid_argument);
    EXPECT_EQ(run({sequence, 1, {1}, {{"state", state}}, {1}}), Code::invalid_argument);
    EXPECT_EQ(run({sequence, 1, std::vector<int32_t>(16, 1), {{"state", std::vector<uint8_t>(16 * 64)}}, {}}),
              Code::resource_exhausted);
    int32_t second = -1;
    int32_t third = -1;
    EXPECT_TRUE(tail->open_sequence(second).ok());
    EXPECT_EQ(tail->open_sequence(third).code, Code::resource_exhausted);
    EXPECT_TRUE(tail->close_sequence(second).ok());
    EXPECT_EQ(tail->close_sequence(second).code, Code::not_found);
    EXPECT_EQ(tail->rollback(sequence, 9).code, Code::failed_precondition);
}

TEST(TestEngine, ModelNamesAndRangesAreChecked) {
    std::unique_ptr<ShardEngine> engine;
    EngineConfig config;
    for (const char * path : {"test:", "test:0", "test:x", "test:4:", "test:4:5:3", "test:4:5:2:1", "model.gguf"}) {
        config.model_path = path;
        EXPECT_EQ(make_test_engine(config, engine).code, Code::invalid_argument) << path;
        EXPECT_EQ(engine, nullptr);
    }
    config.model_path = "test:4:0:2";
    config.layers = {2, 5};
    EXPECT_EQ(make_test_engine(config, engine).code, Code::illegal_cut);
    config.layers = {1, 4};
    ASSERT_TRUE(make_test_engine(config, engine).ok());
    EXPECT_EQ(engine->describe().legal_cuts, (std::vector<uint32_t>{2, 3}));
    EXPECT_EQ(engine->describe().boundary_in.tensors.size(), 2U);
    EXPECT_TRUE(engine->describe().boundary_out.tensors.empty());
}

TEST(TestEngine, TokenizesBytesAndSpecialTokens) {
    auto engine = make_engine("test:1", {0, 1});
    std::vector<int32_t> tokens;
    ASSERT_TRUE(engine->tokenize("a<eos>", true, true, tokens).ok());
    EXPECT_EQ(tokens, (std::vector<int32_t>{256, 'a', 257}));
    ASSERT_TRUE(engine->tokenize("<eos>", false, false, tokens).ok());
    EXPECT_EQ(tokens.size(), 5U);
    std::string bytes;
    ASSERT_TRUE(engine->piece(200, bytes).ok());
    EXPECT_EQ(bytes, "\xc8");
    ASSERT_TRUE(engine->piece(257, bytes).ok());
    EXPECT_TRUE(bytes.empty());
    EXPECT_TRUE(engine->is_eog(257));
    EXPECT_FALSE(engine->is_eog(256));
    EXPECT_FALSE(engine->piece(258, bytes).ok());
}

TEST(EngineTypes, BoundaryDigestCoversNameTypeAndShape) {
    const BoundarySchema schema{{{"h", DType::f32, {4, 2}}}};
    EXPECT_EQ(schema.bytes_per_token(), 32U);
    EXPECT_EQ(BoundarySchema{}.digest(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_NE(schema.digest(), (BoundarySchema{{{"h", DType::f32, {2, 4}}}}.digest()));
    EXPECT_NE(schema.digest(), (BoundarySchema{{{"h", DType::i32, {4, 2}}}}.digest()));
    EXPECT_NE(schema.digest(), (BoundarySchema{{{"g", DType::f32, {4, 2}}}}.digest()));
}

}  // namespace
}  // namespace meshnet
