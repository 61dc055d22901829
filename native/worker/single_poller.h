// One network thread where gRPC would have several.
#pragma once

#include <memory>

namespace meshnet {

// gRPC's callback API polls with two threads or more, which hand every message to each other: for the small frames of
// decode that costs more than reading them, and takes the cores from those that compute. While this lives, one thread
// polls, and the others wait in a callback. Callbacks of a worker are short, so one is enough.
class SinglePoller {
  public:
    // To be made once there is a server, and to end before that is destroyed. All servers and channels of a process
    // share their network threads, so several of these are as one. Keeps all threads if it finds that none would be
    // left.
    SinglePoller();
    SinglePoller(const SinglePoller &) = delete;
    SinglePoller & operator=(const SinglePoller &) = delete;

    // How many threads wait.
    int waiting() const;

  private:
    class Gate;

    std::shared_ptr<Gate> gate_;
};

}  // namespace meshnet
