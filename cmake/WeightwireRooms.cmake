# One CMake library per room: ww_component(layout SOURCES a.cc … DEPS base PRIVATE_DEPS …) makes
# `weightwire_layout`. Room names in DEPS are other rooms; anything with "::" is a package.
function(_ww_link target visibility)
  foreach(dep ${ARGN})
    if(dep MATCHES "::" OR dep MATCHES "^-")
      target_link_libraries(${target} ${visibility} ${dep})
    else()
      target_link_libraries(${target} ${visibility} weightwire_${dep})
    endif()
  endforeach()
endfunction()

function(ww_component name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(weightwire_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(weightwire_${name} PUBLIC weightwire_flags)
  _ww_link(weightwire_${name} PUBLIC ${ARG_DEPS})
  _ww_link(weightwire_${name} PRIVATE ${ARG_PRIVATE_DEPS})
endfunction()

# ww_test(plan_test SOURCES … DEPS plan LABELS unit): one GoogleTest program, its cases found when
# ctest runs. A fixed GTEST_RANDOM_SEED keeps runs repeatable; property tests print their own seed.
function(ww_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE weightwire_flags)
  # The code under test is optimised as shipped; its tests need not be, and build in half the time.
  target_compile_options(${name} PRIVATE -O1)
  _ww_link(${name} PRIVATE ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  # One variable in each property: CMake 3.25's discovery takes a list apart and keeps its head.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST TEST_PREFIX ${name}.
    EXTRA_ARGS --gtest_random_seed=1
    PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
    ENVIRONMENT "WEIGHTWIRE_SOURCE_DIR=${CMAKE_SOURCE_DIR}"
    ENVIRONMENT_MODIFICATION "WEIGHTWIRE_BIN_DIR=set:${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
endfunction()
