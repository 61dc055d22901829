#include "worker/message.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>

namespace meshnet {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;

// Known fields that take about as much memory as room in the message.
bool is_bulk(const FieldDescriptor & field) {
    return field.cpp_type() == FieldDescriptor::CPPTYPE_STRING || field.type() == FieldDescriptor::TYPE_FIXED32;
}

// Walks over a message without reading it, as far as its bytes are well formed and its small parts not too many.
class SmallParts {
  public:
    explicit SmallParts(google::protobuf::io::CodedInputStream & input) : input_(input) {}

    bool walk(const Descriptor & type) {
        while (const uint32_t tag = input_.ReadTag()) {
            if (!walk_field(tag, type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag)))) {
                return false;
            }
            too_many_ = static_cast<uint64_t>(input_.CurrentPosition()) - bulk_bytes_ > max_small_parts_bytes;
            if (too_many_) {
                return false;
            }
        }
        return input_.ConsumedEntireMessage();
    }

    bool too_many() const {
        return too_many_;
    }

  private:
    bool walk_field(uint32_t tag, const FieldDescriptor * field) {
        if (field == nullptr || WireFormatLite::GetTagWireType(tag) != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
            return WireFormatLite::SkipField(&input_, tag);
        }
        int length = 0;
        if (!input_.ReadVarintSizeAsInt(&length)) {
            return false;
        }
        if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
            // A limit beyond the one around it would be cut to that silently.
            if (const int left = input_.BytesUntilLimit(); left >= 0 && length > left) {
                return false;
            }
            const auto outer = input_.PushLimit(length);
            const bool walked = walk(*field->message_type()) && input_.BytesUntilLimit() == 0;
            input_.PopLimit(outer);
            return walked;
        }
        if (!input_.Skip(length)) {
            return false;
        }
        bulk_bytes_ += is_bulk(*field) ? static_cast<uint64_t>(length) : 0;
        return true;
    }

    google::protobuf::io::CodedInputStream & input_;
    uint64_t bulk_bytes_ = 0;
    bool too_many_ = false;
};

Refusal check_small_parts(grpc::ByteBuffer & bytes, const Descriptor & type) {
    grpc::ProtoBufferReader reader(&bytes);
    google::protobuf::io::CodedInputStream input(&reader);
    SmallParts parts(input);
    if (parts.walk(type)) {
        return Refusal::none();
    }
    if (parts.too_many()) {
        return {v1::REFUSAL_BAD_REQUEST,
                "a " + type.name() + " has too many bytes that are neither text nor tokens nor boundary data",
                bytes.Length(), max_small_parts_bytes};
    }
    return bad_request("a message is not a " + type.name());
}

}  // namespace

Refusal read_message(grpc::ByteBuffer & bytes, google::protobuf::Message & message) {
    if (bytes.Length() > max_small_parts_bytes) {
        if (auto refusal = check_small_parts(bytes, *message.GetDescriptor()); refusal.refused()) {
            return refusal;
        }
    }
    grpc::ProtoBufferReader reader(&bytes);
    if (!reader.status().ok() || !message.ParseFromZeroCopyStream(&reader)) {
        return bad_request("a message is not a " + message.GetDescriptor()->name());
    }
    return Refusal::none();
}

grpc::ByteBuffer to_bytes(const google::protobuf::Message & message) {
    grpc::ByteBuffer bytes;
    bool own_buffer = false;
    // It cannot fail: a buffer of memory takes every message.
    using Traits = grpc::SerializationTraits<google::protobuf::Message>;
    static_cast<void>(Traits::Serialize(message, &bytes, &own_buffer).ok());
    return bytes;
}

}  // namespace meshnet
