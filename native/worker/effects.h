// What a change of state asks for once the worker's mutex is released: nothing that writes to the network or calls
// back runs under it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "worker/link.h"
#include "worker/seam_types.h"

namespace meshnet {

struct Effects {
    struct Send {
        std::shared_ptr<Link> link;
        v1::SeamFrame frame;
        SentFrame sent;
    };

    std::vector<Send> sends;
    std::vector<std::shared_ptr<EventSink>> flushes;
    std::vector<std::function<void()>> replies;
    std::vector<PendingCredit> credits;
    std::vector<std::shared_ptr<void>> garbage;  // links and sessions whose last reference may go

    // In the order of what a decode step waits for; credits last.
    void perform() {
        for (auto & send : sends) {
            send.link->send(std::move(send.frame), std::move(send.sent));
        }
        for (auto & sink : flushes) {
            sink->flush();
        }
        for (auto & reply : replies) {
            reply();
        }
        credits.clear();
        garbage.clear();
    }
};

}  // namespace meshnet
