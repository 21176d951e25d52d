// The tests' whole framework: a list of named functions, and checks that print what they saw and
// end the program. Gives up running on after a failure.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace hoploom::test {

inline thread_local bool has_no_memory = false;  // whether this thread's `new` throws

struct Test {
  const char* name;
  void (*body)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> listed;
  return listed;
}

#define TEST(name)                                                                                \
  static void name();                                                                             \
  [[maybe_unused]] static const bool name##_is_listed = (tests().push_back({#name, name}), true); \
  static void name()

template <typename T>
std::string shown(const T& value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}
template <typename T>
std::string shown(const std::vector<T>& values) {
  std::ostringstream text;
  text << values.size() << " of [";
  for (size_t i = 0; i < values.size() && i < 64; ++i) text << (i ? ", " : "") << +values[i];
  text << (values.size() > 64 ? ", ...]" : "]");
  return text.str();
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, message.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

// Out of line, so that a check costs its caller a comparison and a call.
template <typename Seen, typename Wanted>
[[noreturn, gnu::noinline]] void fail_unequal(const char* file, int line, const char* what, const Seen& seen,
                                              const Wanted& wanted) {
  fail(file, line, std::string(what) + ": " + shown(seen) + " is not " + shown(wanted));
}
template <typename Low, typename Value, typename High>
[[noreturn, gnu::noinline]] void fail_outside(const char* file, int line, const char* what, const Low& low,
                                              const Value& value, const High& high) {
  fail(file, line, std::string(what) + " is " + shown(value) + ", not in [" + shown(low) + ", " + shown(high) + "]");
}

#define CHECK(holds)                                                                            \
  do {                                                                                          \
    if (!(holds)) ::hoploom::test::fail(__FILE__, __LINE__, "CHECK(" #holds ") does not hold"); \
  } while (0)

#define CHECK_EQUAL(left, right)                                                                                     \
  do {                                                                                                               \
    const auto& seen_ = (left);                                                                                      \
    const auto& wanted_ = (right);                                                                                   \
    if (!(seen_ == wanted_)) ::hoploom::test::fail_unequal(__FILE__, __LINE__, #left " == " #right, seen_, wanted_); \
  } while (0)

#define CHECK_BETWEEN(low, value, high)                                                \
  do {                                                                                 \
    const auto& seen_ = (value);                                                       \
    if (!((low) <= seen_ && seen_ <= (high)))                                          \
      ::hoploom::test::fail_outside(__FILE__, __LINE__, #value, (low), seen_, (high)); \
  } while (0)

// What the statement threw, or "" if it threw nothing.
template <typename Statement>
std::string thrown_by(Statement statement) {
  try {
    statement();
  } catch (const std::exception& error) {
    return *error.what() ? error.what() : "an exception without a message";
  }
  return "";
}

#define CHECK_THROWS(...)                                                                        \
  do {                                                                                           \
    if (::hoploom::test::thrown_by([&] { (void)(__VA_ARGS__); }).empty())                        \
      ::hoploom::test::fail(__FILE__, __LINE__, "CHECK_THROWS(" #__VA_ARGS__ ") threw nothing"); \
  } while (0)

}  // namespace hoploom::test
