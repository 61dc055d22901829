// One thread for calls that compute for longer than a network thread may be held up.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace meshnet {

class TaskThread {
  public:
    explicit TaskThread(size_t max_waiting) : max_waiting_(max_waiting), thread_([this] { run(); }) {}
    // Runs what is waiting first.
    ~TaskThread() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_one();
        thread_.join();
    }
    TaskThread(const TaskThread &) = delete;
    TaskThread & operator=(const TaskThread &) = delete;

    // False if too many tasks wait already.
    bool post(std::function<void()> task) {
        {
            std::lock_guard lock(mutex_);
            if (tasks_.size() >= max_waiting_) {
                return false;
            }
            tasks_.push_back(std::move(task));
        }
        wake_.notify_one();
        return true;
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
            if (tasks_.empty()) {
                return;
            }
            auto task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            task();
            lock.lock();
        }
    }

    const size_t max_waiting_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace meshnet
