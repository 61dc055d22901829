// Messages whose bytes are few for what they would take in memory, on every way into a worker.
#include <gtest/gtest.h>

#include <grpcpp/impl/codegen/client_unary_call.h>

#include <fstream>

#include "tests/worker_support.h"
#include "worker/message.h"

namespace meshnet::test {
namespace {

// As large as a worker takes.
constexpr size_t large_bytes = 60 << 20;

std::string varint(size_t value) {
    std::string bytes;
    for (; value > 0x7f; value >>= 7) {
        bytes += static_cast<char>(0x80 | (value & 0x7f));
    }
    return bytes + static_cast<char>(value);
}

// A length-delimited field.
std::string field(int number, const std::string & content) {
    return varint(static_cast<size_t>(number) << 3 | 2) + varint(content.size()) + content;
}

std::string repeated(const std::string & part, size_t bytes = large_bytes) {
    std::string all;
    all.reserve(bytes + part.size());
    while (all.size() < bytes) {
        all += part;
    }
    return all;
}

grpc::ByteBuffer buffer(const std::string & bytes) {
    const grpc::Slice slice(bytes);
    return {&slice, 1};
}

template <typename Message>
Refusal read(const std::string & bytes, Message & message) {
    auto made = buffer(bytes);
    return read_message(made, message);
}

template <typename Message>
std::string refused(const std::string & bytes) {
    Message message;
    const auto refusal = read(bytes, message);
    EXPECT_EQ(refusal.code, v1::REFUSAL_BAD_REQUEST);
    EXPECT_LT(message.SpaceUsedLong(), size_t{100} << 20);
    return refusal.message;
}

// Bytes of each kind that take many times as much when they are read.
const std::string empty_tensors =
    field(v1::SeamFrame::kStepFieldNumber, repeated(field(v1::StepFrame::kBoundaryFieldNumber, "")));
const std::string small_indices =
    field(v1::SeamFrame::kStepFieldNumber, field(v1::StepFrame::kSampleAtFieldNumber, repeated("\x01")));
const std::string many_biases = field(v1::GenerateRequest::kSamplingFieldNumber,
                                      repeated(field(v1::SamplingParams::kLogitBiasFieldNumber, "\x08\x01")));
const std::string unknown_texts = repeated(field(1000, ""));
const std::string unknown_numbers = repeated(varint(1000 << 3) + '\x01');

TEST(Messages, ManySmallPartsAreRefusedBeforeTheyAreRead) {
    for (const auto & bytes : {empty_tensors, small_indices, unknown_texts, unknown_numbers}) {
        EXPECT_NE(refused<v1::SeamFrame>(bytes).find("a SeamFrame has too many bytes"), std::string::npos);
    }
    EXPECT_NE(refused<v1::GenerateRequest>(many_biases).find("a GenerateRequest has too many bytes"),
              std::string::npos);
    EXPECT_NE(refused<v1::StatusRequest>(unknown_texts).find("a StatusRequest has too many bytes"), std::string::npos);
}

TEST(Messages, BrokenBytesAreRefused) {
    const std::string cut =
        field(v1::SeamFrame::kStepFieldNumber, std::string(large_bytes, '\0')).substr(0, large_bytes);
    const std::string inner_cut =
        field(v1::SeamFrame::kStepFieldNumber, varint(v1::StepFrame::kBoundaryFieldNumber << 3 | 2) +
                                                   varint(large_bytes + 1) + std::string(large_bytes, '\0'));
    const std::string beyond = field(v1::SeamFrame::kStepFieldNumber,
                                     varint(v1::StepFrame::kBoundaryFieldNumber << 3 | 2) + varint(large_bytes)) +
                               std::string(large_bytes, '\0');
    for (const auto & bytes : {cut, inner_cut, beyond, std::string("\xff\xff\xff"), std::string(large_bytes, '\xff'),
                               std::string(large_bytes, '\x0b')}) {
        EXPECT_EQ(refused<v1::SeamFrame>(bytes), "a message is not a SeamFrame");
    }
}

TEST(Messages, BulkIsRead) {
    v1::SeamFrame frame;
    frame.set_session_id("some session");
    auto & step = *frame.mutable_step();
    step.add_boundary()->set_data(std::string(large_bytes, 'd'));
    for (uint32_t i = 0; i < max_session_tokens; ++i) {
        step.add_tokens(i);
    }
    v1::SeamFrame read_frame;
    EXPECT_EQ(read(frame.SerializeAsString(), read_frame).message, "");
    EXPECT_EQ(read_frame.SerializeAsString(), frame.SerializeAsString());
    v1::StatusRequest padded;
    padded.set_padding(std::string(large_bytes, 'p'));
    v1::StatusRequest read_padded;
    EXPECT_EQ(read(padded.SerializeAsString(), read_padded).message, "");
    EXPECT_EQ(read_padded.padding().size(), large_bytes);
    // Unknown fields of a newer peer, as many as anybody needs.
    EXPECT_EQ(read(repeated(field(1000, "new"), max_small_parts_bytes / 2), read_padded).message, "");
}

// Peak of this process's resident memory since the last call, in bytes.
uint64_t peak_bytes() {
    std::ifstream status("/proc/self/status");
    uint64_t peak_kb = 0;
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            peak_kb = std::stoull(line.substr(6));
        }
    }
    std::ofstream("/proc/self/clear_refs") << "5";
    return peak_kb << 10;
}

grpc::Status call(const std::string & address, const std::string & method, const std::string & bytes) {
    const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    const grpc::internal::RpcMethod raw(method.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    grpc::ByteBuffer answer;
    return grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(channel.get(), raw, &context,
                                                                                 buffer(bytes), &answer);
}

TEST(Messages, NoCallAndNoFrameTakesManyTimesItsSizeInMemory) {
    Hop hop("test:6", LayerRange{3, 6});
    const std::string address = hop.address().address;
    static_cast<void>(peak_bytes());
    const uint64_t before = peak_bytes();
    for (const auto * method : {"Describe", "Status", "Tokenize", "Detokenize", "Open", "Close", "Touch"}) {
        const auto status = call(address, std::string("/meshnet.v1.Shard/") + method, unknown_texts);
        EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method << ": " << status.error_message();
    }
    EXPECT_EQ(call(address, "/meshnet.v1.Shard/Generate", many_biases).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
    for (const auto & bytes : {empty_tensors, small_indices, unknown_texts}) {
        SeamPeer peer(address);
        peer.send_raw(bytes);
        EXPECT_EQ(peer.finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    }
    // Read as it is, some of them take 3 GB. A sanitizer takes some memory as well.
    EXPECT_LT(peak_bytes() - before, 25 * large_bytes);
    EXPECT_EQ(call(address, "/meshnet.v1.Shard/Status", "").error_code(), grpc::StatusCode::OK);
}

}  // namespace
}  // namespace meshnet::test
